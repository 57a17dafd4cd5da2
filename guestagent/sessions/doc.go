// Package sessions runs programs for users in the workload. It keeps the end of their output, gives
// them input, terminals and signals, ends them at a deadline, and attaches hosts to them. It owns the
// routes of sessions. It starts programs in the workload that it is given, and freezes nothing.
package sessions
