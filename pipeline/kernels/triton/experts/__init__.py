"""Expert layers on a GPU: the choice of experts, and products grouped by expert."""
