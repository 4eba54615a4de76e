"""Context of a step's attention, weight loading, and the collectives."""
