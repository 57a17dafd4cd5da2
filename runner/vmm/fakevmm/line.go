package fakevmm

import (
	"context"
	"io"

	"github.com/coppice-dev/coppice/runner/vmm/vmmtest/line"
)

// Line is the guest that the conformance suite speaks to: package line.
func Line(ctx context.Context, c *Computer) {
	disks := make([]line.Disk, 0, len(c.Disks()))
	for _, d := range c.Disks() {
		disks = append(disks, line.Blocks{Device: d})
	}
	line.Serve(ctx, lineMachine{c}, disks, false)
}

type lineMachine struct{ *Computer }

func (m lineMachine) Accept(ctx context.Context) (io.ReadWriteCloser, error) {
	return m.Computer.Accept(ctx)
}

func (m lineMachine) Off(bool) { m.PowerOff() }
