package store

import (
	"context"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"

	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/cli/render"
	"github.com/coppice-dev/coppice/internal/foreign"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// storeCheck is the outcome of a check.
type storeCheck struct {
	coppice.StoreReport

	Data *storeData `json:"data,omitempty"` // nil: nothing was read
}

// storeData is the sum of what was read.
type storeData struct {
	Part        int                    `json:"part"`
	Of          int                    `json:"of"`
	Checkpoints int                    `json:"checkpoints"`
	Frames      int64                  `json:"frames"`
	Bytes       int64                  `json:"bytes"`
	Problems    []coppice.StoreProblem `json:"problems"`
}

// parseSubset reads n/t or p%. For a percentage, it chooses the number of parts that comes nearest to it, and a random part.
func parseSubset(s string) (coppice.StorePart, error) {
	bad := exit.Misuse(fmt.Errorf("--read-data-subset: %q is neither a part such as 1/10 nor a share such as 10%%", s))
	if s == "" {
		return coppice.StorePart{}, nil
	}
	const most = 1_000_000
	if share, ok := strings.CutSuffix(s, "%"); ok {
		p, err := strconv.ParseFloat(share, 64)
		if err != nil || !(p >= 100.0/most && p <= 100) {
			return coppice.StorePart{}, bad
		}
		of := int(math.Round(100 / p))
		return coppice.StorePart{Which: 1 + rand.IntN(of), Of: of}, nil //nolint:gosec // G404: any will do
	}
	which, of, _ := strings.Cut(s, "/")
	n, errN := strconv.Atoi(which)
	t, errT := strconv.Atoi(of)
	if errN != nil || errT != nil || n < 1 || n > t || t > most {
		return coppice.StorePart{}, bad
	}
	return coppice.StorePart{Which: n, Of: t}, nil
}

// readData makes the server read a part of the store, and shows the progress on a terminal.
func readData(ctx context.Context, a *cli.App, client *coppice.Client, part coppice.StorePart) (*storeData, error) {
	out := &storeData{Part: part.Which, Of: part.Of, Problems: []coppice.StoreProblem{}}
	what := fmt.Sprintf("reading part %d/%d", part.Which, part.Of)
	for next := ""; ; {
		done := a.Working(ctx, what)
		page, err := client.CheckStoreData(ctx, part, next)
		done()
		if err != nil {
			return nil, err
		}
		out.Checkpoints += page.Checkpoints
		out.Frames += page.Frames
		out.Bytes += page.Bytes
		for _, p := range page.Problems {
			if !slices.ContainsFunc(out.Problems, func(q coppice.StoreProblem) bool { return q.Object == p.Object && q.Code == p.Code }) {
				out.Problems = append(out.Problems, p)
			}
		}
		if page.Next == "" {
			return out, nil
		}
		next = page.Next
		what = fmt.Sprintf("reading part %d/%d: %d of %d checkpoints, %s, %d problems", part.Which, part.Of,
			out.Checkpoints, out.Checkpoints+page.Remaining, render.Size(out.Bytes), len(out.Problems))
	}
}

func printStoreCheck(w io.Writer, c storeCheck) error {
	if err := printStoreReport(w, c.StoreReport); err != nil || c.Data == nil {
		return err
	}
	fmt.Fprintf(w, "%d frames (%s) of %d checkpoints, part %d/%d, were read and are correct\n", c.Data.Frames, render.Size(c.Data.Bytes), c.Data.Checkpoints, c.Data.Part, c.Data.Of)
	for _, p := range c.Data.Problems {
		more := ""
		if n := p.NeededBy - len(p.Checkpoints); n > 0 {
			more = fmt.Sprintf(" and %d more", n)
		}
		fmt.Fprintf(w, "%s  %s: %s\n  needed by %s%s\n", foreign.Visible(p.Code), foreign.Visible(p.Object), foreign.Visible(p.Message), foreign.Visible(strings.Join(p.Checkpoints, ", ")), more)
	}
	return nil
}
