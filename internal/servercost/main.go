//go:build linux

// Command servercost measures what being watched costs: processor time per
// request at a server with the kernel side on, against the same server with
// nothing attached to the kernel at all, in short alternating rounds. The server
// has one CPU to itself; its client and the reader of the records have another.
//
// The processor time is the kernel's own account of the server's threads
// (/proc/PID/task/TID/schedstat), so it holds the programs that run in their
// context and not what the reader of the records uses.
//
// A round is set against the mean of the rounds without the kernel side before
// and after it, so that what drifts on the machine drops out.
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
	"slices"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "servercost:", err)
		os.Exit(1)
	}
}

func run() error {
	var names, usual []string
	for _, c := range configs {
		names = append(names, c.name)
		if !c.extra {
			usual = append(usual, c.name)
		}
	}
	out := flag.String("out", "out/overhead.json", "`file` for the result as JSON; - is standard output")
	chosen := flag.String("configs", strings.Join(usual, ","), "`names` of what is measured, by commas, of "+strings.Join(names, ","))
	rounds := flag.Int("rounds", 40, "rounds of each configuration, with as many and one without the kernel side")
	requests := flag.Int("requests", 4000, "requests a round; the LLM server gets one for every "+strconv.Itoa(llmShare))
	cost := flag.Bool("programs", true, "count afterwards how often each program runs per request, and how long")
	flag.Parse()
	if flag.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q; see -help", flag.Arg(0))
	}
	if *rounds < 1 || *requests < llmShare {
		return fmt.Errorf("needs at least one round and %d requests", llmShare)
	}
	if os.Geteuid() != 0 {
		return errors.New("must run as root: loads programs into the kernel")
	}
	if err := keepTo(clientCPU); err != nil {
		return err
	}
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()

	var r result
	for name := range strings.FieldsFuncSeq(*chosen, func(r rune) bool { return r == ',' }) {
		i := slices.IndexFunc(configs, func(c config) bool { return c.name == name })
		if i < 0 {
			return fmt.Errorf("-configs: there is no %q; choose from %s", name, strings.Join(names, ","))
		}
		row, err := measure(ctx, configs[i], *rounds, *requests, *cost)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		r.Configs = append(r.Configs, row)
		r.Machine = thisMachine()
		// each row at once: a later one that fails must not take the others with it
		if err := r.save(*out); err != nil {
			return err
		}
	}
	r.print(os.Stderr)
	if *out == "-" {
		return r.encode(os.Stdout)
	}
	return nil
}

type result struct {
	Machine machine `json:"machine"`
	Configs []row   `json:"configs"`
}

type machine struct {
	Kernel string  `json:"kernel"`
	CPUs   int     `json:"cpus"`
	Load   float64 `json:"load_average"` // of the last minute
}

// row is one configuration against nothing attached.
type row struct {
	Name string  `json:"name"`
	Bar  float64 `json:"cpu_ratio_bar,omitempty"` // what CPUMedian shall not exceed
	// of the ratios round by round
	CPUMedian float64 `json:"cpu_ratio_median"`
	CPUP25    float64 `json:"cpu_ratio_p25"`
	CPUP75    float64 `json:"cpu_ratio_p75"`
	CPULow    float64 `json:"cpu_ratio_median_low"` // 95 % confidence interval of the median
	CPUHigh   float64 `json:"cpu_ratio_median_high"`
	P99Median float64 `json:"p99_ratio_median"`
	Rounds    int     `json:"rounds"`
	// one round without the kernel side against its neighbours, as if it were one with it: how still the machine was
	ControlP25 float64 `json:"control_ratio_p25"`
	ControlP75 float64 `json:"control_ratio_p75"`
	// medians over the rounds
	CPUOff float64 `json:"cpu_us_per_request_off"`
	CPUOn  float64 `json:"cpu_us_per_request_on"`
	P99Off float64 `json:"p99_us_off"` // of a request; for the LLM server, between two tokens
	P99On  float64 `json:"p99_us_on"`

	Seen     int       `json:"requests_seen"`
	Lost     uint64    `json:"lost_records"`
	Programs []program `json:"programs,omitempty"`
}

// program is what one program of the kernel side does, on all CPUs: the client's
// share of a loopback connection is in it.
type program struct {
	Name string  `json:"name"`
	Runs float64 `json:"runs_per_request"`
	NS   float64 `json:"ns_per_run"`
}

func (r *result) encode(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", " ")
	return e.Encode(r)
}

func (r *result) save(path string) error {
	if path == "-" {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	return errors.Join(r.encode(f), f.Close())
}

func (r *result) print(out io.Writer) {
	fmt.Fprintf(out, "Linux %s, %d CPUs, load %.2f\n\n", r.Machine.Kernel, r.Machine.CPUs, r.Machine.Load)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "configuration\tCPU ratio\t95 %\tquartiles\tbar\tCPU us off\ton\tp99 ratio\trounds\toff against off\tlost")
	for _, c := range r.Configs {
		bar := "none"
		if c.Bar > 0 {
			bar = fmt.Sprintf("%.2f", c.Bar)
			if c.CPUMedian > c.Bar {
				bar += fmt.Sprintf(" missed by %.3f", c.CPUMedian-c.Bar)
			}
		}
		fmt.Fprintf(w, "%s\t%.3f\t%.3f–%.3f\t%.3f–%.3f\t%s\t%.2f\t%.2f\t%.2f\t%d\t%.3f–%.3f\t%d\n", c.Name, c.CPUMedian, c.CPULow, c.CPUHigh, c.CPUP25, c.CPUP75, bar,
			c.CPUOff, c.CPUOn, c.P99Median, c.Rounds, c.ControlP25, c.ControlP75, c.Lost)
	}
	w.Flush()
	for _, c := range r.Configs {
		if len(c.Programs) == 0 {
			continue
		}
		fmt.Fprintf(out, "\n%s, by the kernel's account of its programs (which itself adds some 60 ns a run):\n", c.Name)
		fmt.Fprintln(w, "program\truns a request\tns a run\tns a request")
		var sum float64
		for _, p := range c.Programs {
			sum += p.Runs * p.NS
			fmt.Fprintf(w, "%s\t%.2f\t%.0f\t%.0f\n", p.Name, p.Runs, p.NS, p.Runs*p.NS)
		}
		fmt.Fprintf(w, "all\t\t\t%.0f\n", sum)
		w.Flush()
	}
}
