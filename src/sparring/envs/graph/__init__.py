"""Knowledge graphs: worlds, tools, tasks, an exact solver and a validator that replays what a generator claims."""
