"""`pipeline bench gpu`: some minutes on a card, as a session of sections: is everything right, where does the time go?

Runs without Ray, pydantic, click and a network. `session` starts the processes of `sections`, which measure with
`kernels`, `steps` and `jobs`; `report` puts their results together, and `aims` judges them.
"""
