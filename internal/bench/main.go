// Command bench measures what the project says about its own speed, prints it
// as a table and writes it as JSON:
//
//   - DBSCAN beside scikit-learn's, CPU time and memory, labels compared, and a
//     step of a sliding window beside a full run;
//   - the spike_sampling processor beside contrib's tail_sampling, interleaved;
//   - how many planted spikes it finds, alone and where several samplers share the
//     traces, and what a step of its clustering takes, measured by a command given to
//     it;
//   - what a traced server pays per request, measured by a command given to it.
//
// It is a module of its own so that what it compares with does not become a
// dependency of the project. What could not be measured is listed with the
// reason, and is never a zero.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"syscall"
	"text/tabwriter"
	"time"
)

// report is what out/bench.json holds.
type report struct {
	Time    time.Time `json:"time"`
	Machine machine   `json:"machine"`
	Rows    []row     `json:"rows"`
	LeftOut []leftOut `json:"left_out"`
	// ServerCost is what the -server-cost command printed, as it is.
	ServerCost json.RawMessage `json:"server_cost,omitempty"`
}

type machine struct {
	Kernel string `json:"kernel"`
	Arch   string `json:"arch"`
	CPUs   int    `json:"cpus"`
	Go     string `json:"go"`
}

// row is one measured value.
type row struct {
	Name    string  `json:"name"`    // what was measured
	Subject string  `json:"subject"` // on whom
	Value   float64 `json:"value"`
	Unit    string  `json:"unit"`
	// RatioTo names the subject that Ratio compares with. Ratio is above 1
	// where this row's subject is better.
	RatioTo string  `json:"ratio_to,omitempty"`
	Ratio   float64 `json:"ratio,omitempty"`
	Note    string  `json:"note,omitempty"`
}

// leftOut is a measurement that was not made.
type leftOut struct {
	Name   string `json:"name"`
	Reason string `json:"reason"`
}

// compare sets the ratio of a row to the row of another subject, for values
// of which less is better, or more if so said.
func (r *row) compare(to row, moreIsBetter bool) {
	a, b := to.Value, r.Value
	if moreIsBetter {
		a, b = b, a
	}
	if b > 0 {
		r.RatioTo, r.Ratio = to.Subject, a/b
	}
}

func main() {
	out := flag.String("out", "", "write the results to this file as JSON")
	all := flag.Bool("all", false, "also run scikit-learn on 1e6 points: minutes, and 10 GB of memory")
	clusterOnce := flag.String("cluster-once", "", "the program of ./clusteronce, built")
	benchmarks := flag.String("benchmarks", "", "shell command that runs the processor's benchmarks Recall, Planted and Step")
	fill := flag.Int("fill", 0, "only fill the buffer of spike_sampling with so many traces, twice, and print what a span costs: this program runs itself so, in a new process")
	serverCost := flag.String("server-cost", "", "shell command that measures the cost to a traced server and prints a JSON object, "+
		"with rows shaped as those of this program under \"rows\"; needs root")
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "bench: unexpected argument %q\n", flag.Arg(0))
		os.Exit(2)
	}

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	var err error
	if *fill > 0 {
		err = fillTwice(ctx, *fill)
	} else {
		err = run(ctx, *out, *clusterOnce, *all, *benchmarks, *serverCost)
	}
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// run makes all measurements. One that fails is reported and does not keep the
// others from being written.
func run(ctx context.Context, out, clusterOnce string, all bool, benchmarks, serverCost string) error {
	rep := report{Time: time.Now().UTC().Truncate(time.Second), Machine: thisMachine(), LeftOut: []leftOut{}}
	err := errors.Join(
		measureClustering(ctx, &rep, clusterOnce, all),
		measureAgreement(ctx, &rep),
		measureWindow(&rep),
		measureProcessors(ctx, &rep),
		measureGrowth(ctx, &rep),
		measureBenchmarks(ctx, &rep, benchmarks),
		measureServer(ctx, &rep, serverCost),
	)
	printTable(os.Stdout, &rep)
	if out != "" {
		err = errors.Join(err, writeJSON(out, &rep))
	}
	return err
}

func thisMachine() machine {
	m := machine{Arch: runtime.GOARCH, CPUs: runtime.NumCPU(), Go: runtime.Version()}
	var u syscall.Utsname
	if syscall.Uname(&u) == nil {
		for _, c := range u.Release {
			if c == 0 {
				break
			}
			m.Kernel += string(rune(c))
		}
	}
	return m
}

func writeJSON(path string, rep *report) error {
	b, err := json.MarshalIndent(rep, "", "  ")
	if err != nil {
		return fmt.Errorf("write results: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("write results: %w", err)
	}
	if err := os.WriteFile(path, append(b, '\n'), 0o644); err != nil {
		return fmt.Errorf("write results: %w", err)
	}
	return nil
}

func printTable(out io.Writer, rep *report) {
	fmt.Fprintf(out, "linux %s, %s, %d CPUs, %s\n\n", rep.Machine.Kernel, rep.Machine.Arch, rep.Machine.CPUs, rep.Machine.Go)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "what\tsubject\tvalue\tunit\tcompared\tnote")
	for _, r := range rep.Rows {
		ratio := ""
		if r.RatioTo != "" {
			ratio = fmt.Sprintf("%s × better than %s", digits(r.Ratio), r.RatioTo)
			if r.Ratio < 1 {
				ratio = fmt.Sprintf("%s × worse than %s", digits(1/r.Ratio), r.RatioTo)
			}
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", r.Name, r.Subject, digits(r.Value), r.Unit, ratio, r.Note)
	}
	w.Flush()
	for _, l := range rep.LeftOut {
		fmt.Fprintf(out, "\nnot measured: %s: %s\n", l.Name, l.Reason)
	}
}

// digits shows at least three significant digits.
func digits(x float64) string {
	if x >= 100 || x <= -100 {
		return strconv.FormatFloat(x, 'f', 0, 64)
	}
	return strconv.FormatFloat(x, 'g', 3, 64)
}

func median(x []float64) float64 {
	s := slices.Sorted(slices.Values(x))
	n := len(s)
	if n%2 == 0 {
		return (s[n/2-1] + s[n/2]) / 2
	}
	return s[n/2]
}

// cpuTime is the user and system time of this process so far.
func cpuTime() time.Duration {
	var ru syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &ru); err != nil {
		panic(err) // cannot happen for RUSAGE_SELF
	}
	return time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
}
