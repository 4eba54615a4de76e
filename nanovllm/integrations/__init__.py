"""Adapters for other libraries, one module each. They use only the public interface."""
