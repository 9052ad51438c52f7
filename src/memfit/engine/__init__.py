"""Plan + model + optimizer -> Engine. Runs steps as the plan says; decides nothing."""

from memfit.engine.engine import Engine as Engine
