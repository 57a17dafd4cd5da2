package memory

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// The figures are per MiB of delta, on RAM of 1 GiB; a quarter of the delta lies scattered, page by page.
const benchRAM = 1 << 30

func benchMachine(b *testing.B, store *BaseStore, mib int) *ram {
	b.Helper()
	r := mapPrivate(b, zeroBase(b, store, benchRAM).File(), benchRAM)
	solid := mib << 20 / 4 * 3
	for at := 0; at < solid; at += PageSize {
		r.bytes[at] = 1
	}
	for at, n := benchRAM/2, mib<<20/4/PageSize; n > 0; at, n = at+16*PageSize, n-1 {
		r.bytes[at%benchRAM] = 1
	}
	return r
}

func perMiB(b *testing.B, mib int) {
	b.Helper()
	b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N)/float64(mib), "us/MiB")
}

var benchSizes = []int{1, 16, 128}

func BenchmarkScan(b *testing.B) {
	for _, mib := range benchSizes {
		r := benchMachine(b, newStore(b, false), mib)
		for _, m := range []struct {
			method Method
			scan   func(*os.File, Part) ([]Extent, error)
		}{{MethodPagemapScan, scanIoctl}, {MethodPagemap, scanPagemap}} {
			b.Run(fmt.Sprintf("%s/%dMiB", m.method, mib), func(b *testing.B) {
				for b.Loop() {
					if _, err := scan(r.Region, m.scan); err != nil {
						b.Fatal(err)
					}
				}
				perMiB(b, mib)
			})
		}
	}
}

func BenchmarkCopy(b *testing.B) {
	for _, mib := range benchSizes {
		b.Run(fmt.Sprintf("%dMiB", mib), func(b *testing.B) {
			c, err := Prepare(benchMachine(b, newStore(b, false), mib).Region)
			if err != nil {
				b.Fatal(err)
			}
			defer c.Close()
			for b.Loop() {
				if err := c.Copy(); err != nil {
					b.Fatal(err)
				}
			}
			perMiB(b, mib)
		})
	}
}

func BenchmarkInject(b *testing.B) {
	for _, mib := range benchSizes {
		b.Run(fmt.Sprintf("%dMiB", mib), func(b *testing.B) {
			store := newStore(b, false)
			d := capture(b, benchMachine(b, store, mib).Region)
			zero := zeroBase(b, store, benchRAM)
			for b.Loop() {
				b.StopTimer()
				child := mapPrivate(b, zero.File(), benchRAM)
				b.StartTimer()
				if err := d.Inject(child.Region); err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				child.unmap(b)
				b.StartTimer()
			}
			perMiB(b, mib)
		})
	}
}

func BenchmarkWriteDelta(b *testing.B) {
	for _, mib := range benchSizes {
		b.Run(fmt.Sprintf("%dMiB", mib), func(b *testing.B) {
			d := capture(b, benchMachine(b, newStore(b, false), mib).Region)
			path := filepath.Join(b.TempDir(), "delta")
			for b.Loop() {
				if err := d.WriteFile(path); err != nil {
					b.Fatal(err)
				}
				if err := os.Remove(path); err != nil {
					b.Fatal(err)
				}
			}
			perMiB(b, mib)
		})
	}
}

func BenchmarkRebase(b *testing.B) {
	store := newStore(b, false)
	d := capture(b, benchMachine(b, store, 16).Region)
	base := rebase(b, store, zeroBase(b, store, benchRAM), d)
	for b.Loop() {
		next, err := store.Rebase(base, d)
		if err != nil {
			b.Fatal(err)
		}
		if err := next.Close(); err != nil {
			b.Fatal(err)
		}
		if err := store.Remove(next.ID); err != nil {
			b.Fatal(err)
		}
	}
	perMiB(b, 16)
}
