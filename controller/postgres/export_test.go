package postgres

// SweepStatements are those that run over whole tables, batch by batch.
func SweepStatements() map[string]string {
	return map[string]string{"SweepSessions": sweepSessions, "CountSessions": countSessions, "SweepTokens": sweepExpired, "PruneDeleted": pruneDeleted}
}

// TimeStatements are those that look for times that are up, by the index that each follows.
func TimeStatements() map[string]string {
	return map[string]string{"expiry_idx": expiredWorkspaces, "overdue_idx": dueNow}
}
