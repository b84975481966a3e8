"""What cases do in the child process: functions ``(Subject, params) -> Evidence``. Imported when the first case needs them."""
