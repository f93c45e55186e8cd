"""What is kept: records of cases, the files they live in, and the machine they came from."""
