//go:build linux

package main

import (
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestRoundsAreSetAgainstTheirNeighbours(t *testing.T) {
	cpu := func(r round) float64 { return r.cpu }
	// the machine becomes slower all the time, which is not the kernel side's doing
	off := []round{{cpu: 10}, {cpu: 20}, {cpu: 40}}
	on := []round{{cpu: 15}, {cpu: 45}}
	assert.Equal(t, []float64{1, 1.5}, ratios(off, on, cpu))
}

func TestControlIsOneWhereNothingDiffers(t *testing.T) {
	for n := 3; n <= 6; n++ {
		var off []round
		for i := range n {
			off = append(off, round{cpu: float64(10 + i)})
		}
		p25, p75 := control(off)
		assert.InDelta(t, 1, p25, 1e-9)
		assert.InDelta(t, 1, p75, 1e-9)
	}
}

func TestTimeOfThreadsIsThatOfTheProcess(t *testing.T) {
	before, err := cpuTime(uint32(os.Getpid()))
	require.NoError(t, err)
	for i, x := 0, 0; i < 5e7; i++ {
		x += i * x
	}
	after, err := cpuTime(uint32(os.Getpid()))
	require.NoError(t, err)
	assert.Greater(t, after, before)

	_, err = cpuTime(1 << 30)
	require.ErrorContains(t, err, "1073741824")
}

func TestTheIntervalOfAMedianIsThatOfOrderStatistics(t *testing.T) {
	var v []float64
	for i := range 40 {
		v = append(v, float64(40-i))
	}
	low, high := medianInterval(v)
	assert.InDelta(t, 14, low, 0) // by tables of the sign test
	assert.InDelta(t, 27, high, 0)

	low, high = medianInterval([]float64{3})
	assert.InDelta(t, 3, low, 0)
	assert.InDelta(t, 3, high, 0)
}
