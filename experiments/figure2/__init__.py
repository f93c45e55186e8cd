"""Figure 2 and section 2: schedules, bubbles, memory and traffic."""
