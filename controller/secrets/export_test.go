package secrets

import "time"

// SetNow gives a Vault another clock.
func (v *Vault) SetNow(now func() time.Time) { v.now = now }

// Times that tests step over.
const (
	FreshTime = freshTime
	StaleTime = staleTime
	PauseTime = pauseTime
	AskTime   = askTime
	MaxKeptOf = maxKeptOf
)

// Kept counts the secrets that a Vault remembers.
func (v *Vault) Kept() int {
	v.mu.Lock()
	defer v.mu.Unlock()
	return len(v.kept)
}
