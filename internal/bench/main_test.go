package main

import (
	"testing"

	"github.com/coppice-dev/coppice/internal/testleak"
)

func TestMain(m *testing.M) { testleak.Main(m) }
