"""A longer window: what each rule would do (plan), and a model that carries one (apply)."""
