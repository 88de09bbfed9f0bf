"""What the scheduler keeps of the steps that it planned and the ranks measured."""
