"""The market world: attack, defence and honest business between agents, with real effects and conserved money."""
