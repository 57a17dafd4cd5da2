package main

import (
	"slices"
	"strconv"
	"strings"
)

// faults are what shall go wrong:
//
//	hang:CALL        the call, vm.restore for example, is never answered, and with it no other. hang:start: nothing is served at all
//	die:CALL         the process is killed in the call. die:start: it ends before it serves
//	500:CALL         the call is answered 500, and nothing is done
//	cut:CALL         the answer's JSON is cut off
//	drop:CALL        the connection ends in the middle of the answer
//	endless:CALL     the answer does not end
//	garbage:CALL     the answer is no HTTP
//	version=N        another version, 52.0 for example
//	garbage-version  --version prints rubbish
//	snapshot-config-only     vm.snapshot fails after config.json
//	snapshot-overwrites      vm.snapshot succeeds although there is a memory-ranges
//	snapshot-other-words     EEXIST has other words
//	snapshot-cut             state.json is cut off
//	events-silent    the event monitor gets nothing
//	vsock-silent     CONNECT is never answered
//	vsock-refuses    CONNECT ends the connection
//	vsock-refuses-once       the first CONNECT of a VM does
//
// CALL@N means its Nth call only.
type faults []string

func (f faults) is(name string) bool { return slices.Contains(f, name) }

func (f faults) version() string {
	for _, have := range f {
		if v, ok := strings.CutPrefix(have, "version="); ok {
			return v
		}
	}
	return version
}

// of returns what goes wrong in the nth call of a name: "hang", "die" and so on, or nothing.
func (f faults) of(call string, nth int) string {
	for _, have := range f {
		kind, target, ok := strings.Cut(have, ":")
		name, only, numbered := strings.Cut(target, "@")
		if !ok || name != call {
			continue
		}
		if n, err := strconv.Atoi(only); !numbered || err == nil && n == nth {
			return kind
		}
	}
	return ""
}
