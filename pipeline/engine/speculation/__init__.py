"""Draft policy: drafts on or off, by measurement. No torch."""
