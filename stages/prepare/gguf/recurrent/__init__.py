"""Files of models with recurrent layers."""
