package runner

import "testing"

// TestRoomIsReported: when a checkpoint is deleted or a sandbox ends, the controller hears at once how much is free. What was not
// there makes no room and no message: a message for it could cause the same order again, without end.
func TestRoomIsReported(t *testing.T) {
	t.Parallel()
	r := newFakeRig(t, func(c *Config) { c.Rebase.Off = true })
	cp := r.boot()
	s := r.fork(cp)
	for _, c := range []struct {
		what string
		do   func() error
		sent bool
	}{
		{"a checkpoint is deleted", func() error { return r.DeleteCheckpoint(cp) }, true},
		{"it is deleted again", func() error { return r.DeleteCheckpoint(cp) }, false},
		{"a sandbox ends", func() error { return r.Destroy(t.Context(), s) }, true},
		{"it ends again", func() error { return r.Destroy(t.Context(), s) }, false},
	} {
		for len(r.Wake()) > 0 {
			<-r.Wake()
		}
		if err := c.do(); err != nil {
			t.Fatalf("%s: %v", c.what, err)
		}
		if sent := len(r.Wake()) > 0; sent != c.sent {
			t.Errorf("%s: a heartbeat is sent: %t, want %t", c.what, sent, c.sent)
		}
	}
}
