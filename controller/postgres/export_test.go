package postgres

// SweepStatements are those that run over whole tables, batch by batch.
func SweepStatements() map[string]string {
	return map[string]string{"SweepSessions": sweepSessions, "CountSessions": countSessions, "SweepTokens": sweepExpired, "PruneDeleted": pruneDeleted}
}
