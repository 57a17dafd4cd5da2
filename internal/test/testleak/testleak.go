// Package testleak fails a package's tests when goroutines outlive them.
package testleak

import (
	"time"

	"go.uber.org/goleak"
)

// patience is how long goroutines may take to end after the last test. goleak itself waits for less than half a second, and on a
// busy machine one that was told to end may not have been run by then. A test of this package shortens it.
var patience = 30 * time.Second

// Main is the TestMain of a package that starts goroutines.
func Main(m goleak.TestingM, options ...goleak.Option) {
	goleak.VerifyTestMain(patient{m, options}, options...)
}

type patient struct {
	goleak.TestingM
	options []goleak.Option
}

// Run returns when the tests have run and what they started has ended, or does not end.
func (p patient) Run() int {
	status := p.TestingM.Run()
	for began := time.Now(); status == 0 && time.Since(began) < patience; {
		if goleak.Find(p.options...) == nil { // it waits a little, too
			break
		}
	}
	return status
}
