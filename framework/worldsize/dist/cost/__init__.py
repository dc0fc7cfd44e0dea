"""Cost models of links and collectives: pure formulas that strategies build on."""
