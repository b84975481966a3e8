"""Several workers that share one model: the first schedules and leads, the others follow its steps."""
