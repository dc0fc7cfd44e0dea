"""What links and collectives cost: pure formulas, below the strategies that use them."""
