package guestclient

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/boundjson"
	"github.com/coppice-dev/coppice/internal/pace"
)

// MaxOutput is how many bytes of each output stream the answer of an exec has: as many as the agent keeps.
const MaxOutput = 1 << 20

// roomPause is the time between two looks for room.
const roomPause = 20 * time.Millisecond

// roomFor waits until there is room for an answer of n bytes. The program has run, so its output is not given up at once when the guests of the
// project send too much. Each stream waits for its own room and holds none meanwhile.
func (c *Client) roomFor(ctx context.Context, account *boundjson.Account, n int) error {
	limit, cancel := context.WithTimeout(ctx, c.cfg.Timeout)
	defer cancel()
	for !account.Reserve(n) {
		if pace.Pause(limit, roomPause) != nil {
			return context.Cause(ctx) // nil while the caller still waits: then the answer is read as far as there is room, like other answers
		}
	}
	return nil
}

// Output reads the end of the kept output of a stream: at most the last bytes, and no more than MaxOutput.
func (c *Client) Output(ctx context.Context, s model.Sandbox, id core.SessionID, stream string, first, end int64, most int) ([]byte, bool, error) {
	if end <= 0 {
		return nil, false, nil
	}
	if first > end {
		return nil, false, core.Errorf(core.Unavailable, core.CodeGuestProtocol, "the guest's agent reports output of session %s that begins after its end", id)
	}
	offset := max(first, end-int64(most), 0)
	q := url.Values{"stream": {stream}, "offset": {strconv.FormatInt(offset, 10)}}
	account := c.bytes.Open(string(s.ProjectID))
	defer account.Close()
	if err := c.roomFor(ctx, account, int(min(end-offset, int64(most)))); err != nil {
		return nil, false, err
	}
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Timeout)
	defer cancel()
	res, err := c.ask(ctx, s, http.MethodGet, sessionPath(id, "output"), q, "", nil)
	if err != nil {
		return nil, false, err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(boundjson.Charged(io.LimitReader(res.Body, int64(most)), account))
	if err != nil {
		if ctx.Err() != nil || errors.Is(err, boundjson.ErrFull) {
			return nil, false, fault(ctx, err)
		}
		return nil, false, core.Wrapf(err, core.Unavailable, core.CodeGuestUnreachable, "the output of session %s could not be read to its end", id)
	}
	// A background process may have written more, so that the agent dropped output that was there a moment ago.
	start, err := strconv.ParseInt(res.Header.Get("Coppice-Offset"), 10, 64)
	return b, offset > 0 || err == nil && start > 0, nil
}
