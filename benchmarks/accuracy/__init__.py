"""How accurate the shipped profiles are: judging and fitting them, and the studies behind them."""
