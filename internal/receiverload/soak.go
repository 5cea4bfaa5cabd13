//go:build linux && amd64

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"slices"
	"text/tabwriter"
	"time"
)

// soakReport is what -out holds after a soak.
type soakReport struct {
	Time     time.Time         `json:"time"`
	Machine  machine           `json:"machine"`
	Length   time.Duration     `json:"length_ns"`
	Rate     float64           `json:"requests_per_second"`
	Answered int               `json:"requests_answered"`
	Recorded uint64            `json:"requests_recorded"`
	Lost     map[string]uint64 `json:"records_lost"`
	Unparsed map[string]uint64 `json:"messages_unparsed"`
	Flat     bool              `json:"flat"`
	Trends   []trend           `json:"trends"`
	Samples  []timed           `json:"samples"`
}

type timed struct {
	At time.Duration `json:"at_ns"` // since the beginning
	sample
}

// samplesOfSoak are taken in a soak, evenly; of the first skipped quarter none is
// fitted, since caches and pools fill then.
const samplesOfSoak = 120

// runSoak keeps up a mixed load and samples what the receiver holds. The error
// names what grows.
func runSoak(ctx context.Context, length time.Duration, rate float64, out, profile string) error {
	if length < time.Minute {
		return fmt.Errorf("-soak is %v: in less than a minute no trend shows", length)
	}
	u, err := start()
	if err != nil {
		return err
	}
	rep, err := u.soak(ctx, length, rate)
	if profile != "" {
		err = errors.Join(err, writeHeap(filepath.Join(profile, "receiver-heap.pprof")))
	}
	if err := errors.Join(err, u.stop()); err != nil {
		return err
	}
	printSoak(os.Stdout, rep)
	var errs []error
	if out != "" {
		errs = append(errs, writeJSON(out, rep))
	}
	for reason, n := range rep.Lost {
		errs = append(errs, fmt.Errorf("%d records lost: %s", n, reason))
	}
	for _, t := range rep.Trends {
		if !t.Flat {
			errs = append(errs, fmt.Errorf("%s grows by %.3g an hour", t.Name, t.PerHour))
		}
	}
	return errors.Join(errs...)
}

// writeHeap says what holds the memory that is left.
func writeHeap(path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	runtime.GC()
	return errors.Join(pprof.Lookup("heap").WriteTo(f, 0), f.Close())
}

func (u *under) soak(ctx context.Context, length time.Duration, rate float64) (*soakReport, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var did asked
	done := make(chan error, 1)
	begin := time.Now()
	go func() {
		done <- child(ctx, "client", order{Addr: u.addr, Rate: rate, Mixed: true, Length: length}, &did)
	}()
	rep := &soakReport{Time: begin.UTC().Truncate(time.Second), Machine: thisMachine(), Length: length, Rate: rate}
	tick := time.NewTicker(length / samplesOfSoak)
	defer tick.Stop()
	for range samplesOfSoak - 1 {
		select {
		case <-tick.C:
		case err := <-done:
			return nil, errors.Join(errors.New("the client ended early"), err)
		}
		s, err := takeSample()
		if err != nil {
			return nil, errors.Join(err, cancelled(cancel, done))
		}
		rep.Samples = append(rep.Samples, timed{time.Since(begin), s})
	}
	if err := <-done; err != nil {
		return nil, err
	}
	time.Sleep(settle)
	rep.Answered, rep.Recorded = did.Answered, u.requests.Load()
	if rep.Recorded < uint64(rep.Answered) {
		return nil, fmt.Errorf("%d requests were answered and %d recorded", rep.Answered, rep.Recorded)
	}
	var err1, err2 error
	rep.Lost, err1 = u.counter("records_lost")
	rep.Unparsed, err2 = u.counter("messages_unparsed")
	rep.Trends = trends(rep.Samples[len(rep.Samples)/4:])
	rep.Flat = !slices.ContainsFunc(rep.Trends, func(t trend) bool { return !t.Flat })
	return rep, errors.Join(err1, err2)
}

// trend is a line through what was sampled, by least squares.
type trend struct {
	Name    string  `json:"name"`
	Mean    float64 `json:"mean"`
	PerHour float64 `json:"slope_per_hour"`
	Error   float64 `json:"slope_standard_error"` // per hour
	Grown   float64 `json:"growth"`               // along the line, from the first to the last sample
	Allowed float64 `json:"allowed_growth"`
	Flat    bool    `json:"flat"`
}

// A value is flat if the line through it rises by no more than allowedShare of
// its mean, or by so little that it is nothing, or by less than what chance makes
// of it: twice the slope's standard error.
const allowedShare = 0.03

// nothing is a growth that is none, by the name of the value.
var nothing = map[string]float64{
	"rss_mib": 2, "live_heap_mib": 0.5, "bpf_maps_mib": 0.5, "goroutines": 1, "open_files": 1,
}

// nothingInMaps is the same for entries of a map.
const nothingInMaps = 16

func trends(samples []timed) []trend {
	values := map[string][]float64{}
	var hours []float64
	for _, s := range samples {
		hours = append(hours, s.At.Hours())
		for name, v := range map[string]float64{
			"rss_mib": s.RSS, "live_heap_mib": s.Heap, "bpf_maps_mib": s.Maps,
			"goroutines": float64(s.Goroutines), "open_files": float64(s.Files),
		} {
			values[name] = append(values[name], v)
		}
		for name, n := range s.Entries {
			values["map_entries/"+name] = append(values["map_entries/"+name], float64(n))
		}
	}
	var list []trend
	for _, name := range slices.Sorted(maps.Keys(values)) {
		least, ok := nothing[name]
		if !ok {
			least = nothingInMaps
		}
		list = append(list, fit(name, hours, values[name], least))
	}
	return list
}

// fit lays a line through values at times in hours.
func fit(name string, hours, values []float64, nothing float64) trend {
	n := float64(len(values))
	t := trend{Name: name}
	var at float64
	for i := range values {
		at += hours[i] / n
		t.Mean += values[i] / n
	}
	var xx, xy float64
	for i := range values {
		xx += (hours[i] - at) * (hours[i] - at)
		xy += (hours[i] - at) * (values[i] - t.Mean)
	}
	t.PerHour = xy / xx
	var residual float64
	for i := range values {
		r := values[i] - t.Mean - t.PerHour*(hours[i]-at)
		residual += r * r
	}
	t.Error = math.Sqrt(residual / (n - 2) / xx)
	t.Grown = t.PerHour * (hours[len(hours)-1] - hours[0])
	t.Allowed = max(nothing, allowedShare*t.Mean)
	t.Flat = t.Grown <= t.Allowed || t.PerHour <= 2*t.Error
	return t
}

func printSoak(out io.Writer, rep *soakReport) {
	fmt.Fprintf(out, "Linux %s, %d CPUs, %s; %v at %g requests/s: %d answered, %d recorded, lost %v, unparsed %v\n\n",
		rep.Machine.Kernel, rep.Machine.CPUs, rep.Machine.Go, rep.Length, rep.Rate, rep.Answered, rep.Recorded, rep.Lost, rep.Unparsed)
	w := tabwriter.NewWriter(out, 0, 0, 1, ' ', 0)
	fmt.Fprintln(w, "| value \t| mean \t| slope per hour \t| growth in the soak \t| allowed \t| \t|")
	fmt.Fprintln(w, "|---\t|---\t|---\t|---\t|---\t|---\t|")
	for _, t := range rep.Trends {
		verdict := "flat"
		if !t.Flat {
			verdict = "GROWS"
		}
		fmt.Fprintf(w, "| %s \t| %.2f \t| %+.2f ± %.2f \t| %+.2f \t| %.2f \t| %s \t|\n", t.Name, t.Mean, t.PerHour, t.Error, t.Grown, t.Allowed, verdict)
	}
	w.Flush()
}
