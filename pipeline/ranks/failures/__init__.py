"""How a rank learns that another one has failed or is gone."""
