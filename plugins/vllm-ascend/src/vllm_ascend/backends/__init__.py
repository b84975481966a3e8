"""What is offered, by chip family."""
