package controller

import "encoding/json"

// SizeOf is the size of a value as JSON, in bytes.
func SizeOf(v any) int {
	b, err := json.Marshal(v)
	if err != nil {
		return 0 // a value that came from JSON can be encoded again
	}
	return len(b)
}
