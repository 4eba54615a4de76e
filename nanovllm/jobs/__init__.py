"""Jobs: files of prompts in, files of completions out, above `LLM`."""
