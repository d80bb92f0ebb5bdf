"""Who meets whom: tasks, opponents of the past, and who judges."""
