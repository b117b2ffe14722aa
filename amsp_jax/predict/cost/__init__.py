"""What a step costs: memory, communication, time. One term a function, each with its equation and source."""
