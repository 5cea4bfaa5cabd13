package spikesamplingprocessor

import (
	"math"
	"slices"
	"time"

	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// The axes by which spikes can be compared, and the unit of their scales.
const (
	axisTime    = "time"    // when the stall ended, in seconds
	axisRatio   = "ratio"   // value over baseline, in powers of two
	axisLatency = "latency" // the value, in milliseconds
	axisStage   = "stage"   // the number of the stage: then stages can be neighbours
	axisHops    = "hops"    // services of the trace that have come, at least 1
)

// features are a spike's coordinates before scaling.
type features struct {
	at      int64 // ns since the epoch
	ratio   float64
	seconds float64
	stage   stage.Stage
	hops    int
}

// axes are the axes in the order in which the window has them, time first.
type axes struct {
	axes     []AxisConfig
	timeless bool
	epoch    int64 // ns: where the time axis begins
}

func newAxes(cfg ClusteringConfig, epoch int64) axes {
	a := axes{timeless: !cfg.has(axisTime), epoch: epoch}
	if a.timeless {
		a.axes = []AxisConfig{{Name: axisTime, Scale: 1}}
	}
	for _, first := range []bool{true, false} {
		for _, x := range cfg.Axes {
			if (x.Name == axisTime) == first {
				a.axes = append(a.axes, x)
			}
		}
	}
	return a
}

// time is a place on the time axis.
func (a *axes) time(at int64) float64 {
	return time.Duration(at-a.epoch).Seconds() / a.axes[0].Scale
}

// place appends a spike's coordinates to p.
func (a *axes) place(p []float64, f features) []float64 {
	for _, x := range a.axes {
		switch x.Name {
		case axisTime:
			p = append(p, a.time(f.at))
		case axisRatio:
			p = append(p, math.Log2(f.ratio)/x.Scale)
		case axisLatency:
			p = append(p, f.seconds*1e3/x.Scale)
		case axisStage:
			p = append(p, float64(f.stage)/x.Scale)
		case axisHops:
			p = append(p, float64(f.hops)/x.Scale)
		}
	}
	return p
}

// has tells whether spikes are compared by the axis.
func (c *ClusteringConfig) has(axis string) bool {
	return slices.ContainsFunc(c.Axes, func(x AxisConfig) bool { return x.Name == axis })
}

// timeReach is how far apart in time neighbours can be; without a time axis they
// can be anywhere in the window.
func (c *ClusteringConfig) timeReach() time.Duration {
	for _, x := range c.Axes {
		if x.Name == axisTime {
			return time.Duration(c.Eps * x.Scale * float64(time.Second))
		}
	}
	return 0
}
