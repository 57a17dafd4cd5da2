package controller

import (
	"testing"
	"time"
)

// TestRevocationTimes: a key that was revoked is believed for no more than five seconds, whatever the configuration says, and what is under
// way with it is looked at each second.
func TestRevocationTimes(t *testing.T) {
	t.Parallel()
	const most = 5 * time.Second
	if c := (Config{}).WithDefaults(); c.KeyCache+c.LoopInterval > most {
		t.Errorf("by default a key is believed for %s and looked at each %s", c.KeyCache, c.LoopInterval)
	}
	if c := (Config{KeyCache: time.Hour}).WithDefaults(); c.KeyCache > most {
		t.Errorf("a key is believed for %s", c.KeyCache)
	}
}
