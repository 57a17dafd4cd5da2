package explore

import (
	"fmt"
	"testing"
	"time"
)

func schedules() []schedule {
	var list []schedule
	for _, place := range []string{"controller.before_admission", "controller.in_admission", "controller.after_admission", "controller.before_end", "controller.after_end"} {
		list = append(list, schedule{"fork", place, takeover})
	}
	return list
}

func TestExplore(t *testing.T) { //nolint:paralleltest // failpoints are the process's
	for i, s := range schedules() {
		number := i + 1
		if *only != 0 && *only != number {
			continue
		}
		t.Run(fmt.Sprint(number), func(t *testing.T) {
			began := time.Now()
			log, reached := run(t, s)
			if len(log.faults) > 0 || *only != 0 {
				for _, line := range log.lines {
					t.Log(line)
				}
			}
			for _, fault := range log.faults {
				t.Errorf("%s: %s; again: go test ./internal/explore -run TestExplore -explore.schedule %d", s, fault, number)
			}
			t.Logf("%s: reached %v, %s", s, reached, time.Since(began).Round(time.Millisecond))
		})
	}
}
