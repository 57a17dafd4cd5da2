package secrets

import "time"

// SetNow gives a Vault another clock.
func (v *Vault) SetNow(now func() time.Time) { v.now = now }

// Times that tests step over.
const (
	FreshTime = freshTime
	StaleTime = staleTime
	RestTime  = restTime
	AskTime   = askTime
)
