"""The engine: Scheduler and BlockManager decide, ModelRunner computes, LLMEngine is the loop."""
