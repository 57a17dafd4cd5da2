package postgres_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

// TestUploadsAreCountedInTurn: of many uploads that begin at the same time, no more are let in than a project may have.
func TestUploadsAreCountedInTurn(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	const most, tries = 3, 12
	var (
		all     sync.WaitGroup
		refused atomic.Int32
		begin   = make(chan struct{})
	)
	for i := range tries {
		all.Go(func() {
			<-begin
			err := d.try(controller.InProject(d.project), func(ctx context.Context, tx controller.AllTx) error {
				return tx.BeginUpload(ctx, d.project, fmt.Sprint("u", i), string(core.NewID[core.OperationID]()), most, time.Hour)
			})
			switch {
			case core.CodeOf(err) == core.CodeQuotaExceeded:
				refused.Add(1)
			case err != nil:
				t.Error(err)
			}
		})
	}
	close(begin)
	all.Wait()
	if n := refused.Load(); n != tries-most {
		t.Errorf("%d of %d uploads were refused; the project may have %d", n, tries, most)
	}
}
