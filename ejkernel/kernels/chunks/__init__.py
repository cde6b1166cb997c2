"""What recurrences share: where their chunks of tokens lie, and how decays build up inside one."""
