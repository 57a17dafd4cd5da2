package sessions

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/controller/guestclient"
	"github.com/coppice-dev/coppice/controller/model"
)

const (
	followEvery = time.Second
	followBytes = 256 << 10 // of a look at each output; what was written beyond that is left out
)

// follower reads the output of a program as it grows. What a look cannot read, the next one does.
type follower struct {
	keeper         *Keeper
	view           View
	at             model.Sandbox
	give           func([]byte)
	stdout, stderr int64 // what was given
}

// look gives what was written since the last look. now is the session, if it is known.
func (f *follower) look(ctx context.Context, now guestclient.Session) {
	guests := f.keeper.cfg.Guests
	if now.ID == "" {
		var err error
		if now, err = guests.Session(ctx, f.at, f.view.GuestID); err != nil {
			return
		}
	}
	for _, s := range []struct {
		stream     string
		first, end int64
		seen       *int64
	}{{"stdout", now.StdoutFirst, now.StdoutBytes, &f.stdout}, {"stderr", now.StderrFirst, now.StderrBytes, &f.stderr}} {
		if s.end <= *s.seen {
			continue
		}
		b, _, err := guests.Output(ctx, f.at, f.view.GuestID, s.stream, max(s.first, *s.seen), s.end, followBytes)
		if err != nil {
			return
		}
		*s.seen = s.end
		f.give(b)
	}
}
