package main

import (
	"encoding/binary"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestLabelsOfAFileOfPoints(t *testing.T) {
	dir := t.TempDir()
	var b []byte
	for _, x := range []float64{0, 0.5, 1, 1e300} {
		b = binary.LittleEndian.AppendUint64(b, math.Float64bits(x))
	}
	points, labels := filepath.Join(dir, "points"), filepath.Join(dir, "labels")
	require.NoError(t, os.WriteFile(points, b, 0o600))
	require.NoError(t, run([]string{points, "1", "1", "3", "2", labels}))
	got, err := os.ReadFile(labels)
	require.NoError(t, err)
	assert.Equal(t, []byte{
		0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255,
		1, 1, 1, 0,
	}, got)
	require.ErrorContains(t, run([]string{points}), "want POINTS DIMS")
	require.Error(t, run([]string{points, "2", "x", "3", "2", labels}))
}
