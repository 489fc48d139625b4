"""The `recguide` command."""
