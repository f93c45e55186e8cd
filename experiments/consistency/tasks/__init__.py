"""What is trained: images and text, from a library, from folders or made up, and how."""
