// Package egress is the runner's side of the egress process of its host. It starts the process,
// which outlives the runner, and speaks to it (egress/egressapi).
package egress
