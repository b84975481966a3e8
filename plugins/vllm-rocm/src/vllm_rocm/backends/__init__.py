"""What is offered, by architecture family; each family's block sizes are in a file of its own."""
