awk -F, 'NR > 1 && $2 != "" { total[$1] += $2 } END { for (name in total) printf "%s,%.2f\n", name, total[name] }' orders.csv | sort > totals.csv
