package controller

import "encoding/json"

// SizeOf is the size of a value as JSON, in bytes.
func SizeOf(v any) int {
	b, err := json.Marshal(v)
	if err != nil {
		return 0 // what came from JSON goes back to it
	}
	return len(b)
}
