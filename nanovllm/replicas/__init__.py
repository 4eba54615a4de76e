"""Several LLMs in processes of their own, behind one queue of prompts."""
