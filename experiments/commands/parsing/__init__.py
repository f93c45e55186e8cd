"""The options of every verb, and what several verbs read from them."""
